"""`python -m images HOST:PORT` (from tests/cluster): build and push the test images, and print their references."""

import sys

from images import build_test_images

if len(sys.argv) != 2:
    sys.exit(__doc__)
for _name, _reference in build_test_images(sys.argv[1]).items():
    print(_name, _reference)
