"""What `diff --into`, `restore`, `log`, `compact` and `verify` do with chains."""
