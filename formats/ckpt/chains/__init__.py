"""What `append`, `restore`, `log`, `compact` and `verify` do with chains."""
