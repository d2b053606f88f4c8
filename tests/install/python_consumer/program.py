# SPDX-License-Identifier: Apache-2.0
# tests/install/python_consumer/program.py: a user's program on the installed Python package: imports it from the folder that is the first
# argument, and runs it on numpy's arrays. tests/python/test_wheel.py installs the package.
import sys

import numpy

import moe

assert moe.__file__.startswith(sys.argv[1]), moe.__file__
w13, w2 = numpy.ones((2, 6, 4), numpy.float32), numpy.ones((2, 4, 3), numpy.float32)
logits = numpy.zeros((5, 2), numpy.float32)
ids, weights = moe.route(logits, 1)
print(moe.__version__, ids.shape)
if moe.has("onednn"):
    output = moe.experts(numpy.ones((5, 4), numpy.float32), ids, weights, w13, w2)
    expected = 0.5 * 3 * (4 / (1 + numpy.exp(-4.0))) * 4
    assert abs(output - expected).max() < 1e-4, (output, expected)
