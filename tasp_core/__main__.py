"""`python -m tasp_core ...`"""

from .cli.app import main

if __name__ == "__main__":
    main()
