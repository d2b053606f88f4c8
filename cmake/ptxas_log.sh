#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cmake/ptxas_log.sh OBJECT COMMAND...: runs a compilation and keeps what ptxas says of each kernel (-Xptxas=-v) in OBJECT.ptxas.
log=$1.ptxas
shift
"$@" 2>"$log.new"
status=$?
grep -v '^ptxas info\|^[ 0-9]* bytes stack frame' "$log.new" >&2  # the rest is for whoever builds
mv "$log.new" "$log"
exit $status
