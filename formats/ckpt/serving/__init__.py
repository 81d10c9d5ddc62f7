"""Serve the files of a chain over HTTP and HTTPS, to be read only: by followers, shadows, other commands and caches."""
