"""The report of a run, in words and pictures, from the files that it wrote."""
