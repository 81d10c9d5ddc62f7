"""`torch.distributed.checkpoint` over ckpt: a storage reader and a storage writer."""
