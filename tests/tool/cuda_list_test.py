# SPDX-License-Identifier: Apache-2.0
# tests/tool/cuda_list_test.py: every composition of the CUDA space that `moe list` marks "yes" runs and gives the block's output. Skipped
# where the program has none or finds no GPU; compositions that need another GPU are named.
import json
import pathlib
import sys
import tempfile

from compositions import BLOCK, Skipped, run_row
from tool import bf16_rows, in_parallel, moe, padded_block

listed = moe("list", "compositions", "--space", "cuda", "--json", ranks=0)
if listed.returncode != 0:
    sys.exit(f"moe list: {listed}")
table = [row for row in json.loads(listed.stdout) if row["answer"] == "yes"]
if not table:
    print("skipped: this program has no composition of the CUDA space")
    sys.exit(77)
with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    block = bf16_rows(padded_block(BLOCK, folder / "block.safetensors", 128, 128), folder)
    first = run_row(table[0], block, folder / "first.safetensors")
    if isinstance(first, Skipped):
        print(f"skipped: {first}")
        sys.exit(77)
    found = in_parallel([(run_row, row, block, folder / f"{i}.safetensors") for i, row in enumerate(table)], 4)
skipped = [(row, why) for row, why in zip(table, found) if isinstance(why, Skipped)]
failed = [(row, why) for row, why in zip(table, found) if why is not None and not isinstance(why, Skipped)]
for row, why in failed + skipped:
    print(f"{'skipped' if isinstance(why, Skipped) else 'FAILED'}: {row['quantization']} {row['backend']} {row['experts']}: {why}")
print(f"{len(table)} compositions: {len(table) - len(skipped) - len(failed)} ran, {len(skipped)} skipped, {len(failed)} failed")
sys.exit(1 if failed else 0)
