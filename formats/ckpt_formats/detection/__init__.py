"""What lies at a path: whose checkpoint it is, which of several, and what in it is not part of one."""
