"""Prints the path of the executable that cargo built for one target.

cargo test --no-run --message-format=json ... | python3 executable.py TARGET
"""

import json
import sys

found = None
for line in sys.stdin:
    if line.startswith("{"):
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == sys.argv[1]:
            found = message["executable"]
if found is None:
    sys.exit(f"executable.py: cargo built no {sys.argv[1]}")
print(found)
