"""Data that commands read: files of rows, what a row may hold, and windows of token ids. A leaf."""
