#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cmake/ptxas_log.sh OBJECT COMMAND...: runs a compilation and saves the ptxas output of each kernel (-Xptxas=-v) in OBJECT.ptxas.
log=$1.ptxas
shift
"$@" 2>"$log.new"
status=$?
grep -v '^ptxas info\|^[ 0-9]* bytes stack frame' "$log.new" >&2  # show the rest of the output
mv "$log.new" "$log"
exit $status
