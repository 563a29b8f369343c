#!/usr/bin/env bash
# Builds the book into docs/en/_build/html: the generated reference first, then the pages.
# Needs the docs extra: pip install -e ".[docs]"
set -euo pipefail
cd "$(dirname "$0")/.."

command -v jupyter-book >/dev/null || {
    echo 'jupyter-book is missing: pip install -e ".[docs]"' >&2
    exit 1
}
python docs/generate_cli_docs.py
mkdir -p docs/en/_build
jupyter-book build --quiet --warningiserror docs/en
mkdir -p docs/en/_build/html/images
cp docs/images/*.png docs/en/_build/html/images/ 2>/dev/null || true
echo "docs/en/_build/html/index.html"
