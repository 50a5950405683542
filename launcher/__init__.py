"""The command line: job files, environment block, rendering, submission, lifecycle, report."""
