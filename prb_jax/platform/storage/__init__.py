"""Object storage (gs://, s3://): inputs are copied to a local cache; runs work in a local copy that is pushed."""
