"""Files and batches on disk: requests that come as a file's lines, are answered behind all others, and outlive the process."""
