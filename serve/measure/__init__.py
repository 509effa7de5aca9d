"""The commands that measure: bench, profile and tune.  ``bench/`` beside ``serve/`` does the work;
here are their flags, their tables and the files that they keep."""
