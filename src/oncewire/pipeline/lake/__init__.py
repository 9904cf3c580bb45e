"""The lake: a folder of Delta tables. Executors write the files, the driver commits them, each range once."""
