"""The process beside a rank that writes what the trainer copies. Nothing here imports torch."""
