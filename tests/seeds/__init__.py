"""The five documents that Hilt was built from, held against it: one file for each document, named by its sections."""
