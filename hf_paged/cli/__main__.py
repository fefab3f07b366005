"""`python -m hf_paged.cli`."""

from hf_paged.cli.main import program

if __name__ == "__main__":
    program()
