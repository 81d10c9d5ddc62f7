"""Loading checkpoints into live jobs, and saving them from there: docs/jobs.md.

Names are imported on first use, because the writer process does not need torch.
"""
