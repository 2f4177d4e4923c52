"""Object storage (gs://, s3://): inputs are copied to a local cache, and run folders are worked on in a local copy."""
