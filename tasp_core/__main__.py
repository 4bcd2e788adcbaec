"""`python -m tasp_core ...`"""

from .cli import main

if __name__ == "__main__":
    main()
