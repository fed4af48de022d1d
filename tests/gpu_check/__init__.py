"""Checks of the backend on an accelerator: `make gpu-test`.

`program` is the command. It runs each section in processes of its own, prints a line for each check
and writes the table of `bandwidth`. A section is a module with `run(rank)`; `sections` lists them.
"""
