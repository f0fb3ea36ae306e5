"""The command line: one file per verb, found through the table in `main`."""
