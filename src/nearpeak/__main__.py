"""`python -m nearpeak` is the command `nearpeak`."""

from nearpeak.cli.main import run

if __name__ == "__main__":
    run()
