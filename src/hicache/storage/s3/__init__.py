"""Pages as objects of a bucket, on Amazon S3 or whatever else speaks its language."""
