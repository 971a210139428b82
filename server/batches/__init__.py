"""Files and batches on disk. A batch runs the requests of a file behind all others and survives a restart."""
