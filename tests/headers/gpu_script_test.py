#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu sanitize fails where nothing ran, where a case failed and where the sanitizer found something. Needs no GPU: cmake,
compute-sanitizer and the test programs are stand-ins."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "gpu"
# Runs the program and reports SUMMARY, which the test sets.
SANITIZER = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift 2; done
"$@"
echo "========= $SUMMARY"
"""
OK = "[ RUN      ] A.a\n[       OK ] A.a (1 ms)\n[  PASSED  ] 1 test."
FAILED = "[ RUN      ] A.a\n[  FAILED  ] A.a (1 ms)\n[  FAILED  ] 1 test, listed below:\n[  FAILED  ] A.a"
NO_CASE = "Note: Google Test filter = B.*\n[==========] Running 0 tests from 0 test suites.\nfailed: no case was run"
SKIPPED = "[ RUN      ] A.a\n[  SKIPPED ] A.a (0 ms)\nskipped: all 1 cases were skipped"
ENDED = "[ RUN      ] A.a\nSegmentation fault"


def executable(path: pathlib.Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Sanitize(unittest.TestCase):
    def sanitize(self, programs, *arguments, tools="memcheck", summary="ERROR SUMMARY: 0 errors"):
        """Exit code and output of `scripts/gpu sanitize` in a project whose test programs print `programs`: name -> output."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "scripts").mkdir()
            shutil.copy(SCRIPT, root / "scripts")
            executable(root / "bin" / "cmake", "#!/bin/sh\n")
            executable(root / "bin" / "compute-sanitizer", SANITIZER)
            for name, output in programs.items():
                executable(root / f"build/gpu/tests/gpu/gpu_{name}_test", f"#!/bin/sh\ncat <<'end'\n{output}\nend\n")
            own = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
            environment = {**own, "PATH": f"{root / 'bin'}:{own['PATH']}", "MOE_SANITIZE_TOOLS": tools, "SUMMARY": summary}
            done = subprocess.run([root / "scripts" / "gpu", "sanitize", *arguments], env=environment, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, check=False)
            return done.returncode, done.stdout

    def passes(self, programs, *arguments, **options):
        code, said = self.sanitize(programs, *arguments, **options)
        self.assertEqual(code, 0, said)
        self.assertIn("1 passed", said)

    def fails(self, sentence, programs, *arguments, **options):
        code, said = self.sanitize(programs, *arguments, **options)
        self.assertNotEqual(code, 0, said)
        self.assertIn(sentence, said)

    def test_something_ran(self):
        self.passes({"a": OK})
        self.passes({"a": OK, "b": ENDED}, "^gpu_a_")
        self.passes({"a": OK, "b": NO_CASE}, ".", "A.*")
        self.passes({"a": OK}, tools="synccheck")
        self.passes({"a": OK}, tools="racecheck", summary="RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")

    def test_nothing_ran(self):
        self.fails("sanitize: nothing was run: no program build/gpu/tests/gpu/gpu_*_test matches 'other'", {"a": OK}, "other")
        self.fails("sanitize: nothing was run", {"a": OK}, "build")  # a folder of its path
        self.fails("sanitize: nothing was run", {})
        self.fails("or no case matches 'B.*'", {"a": NO_CASE, "b": NO_CASE}, ".", "B.*")

    def test_a_program_that_finished_no_case(self):
        for output in (ENDED, SKIPPED, ""):
            self.fails("sanitize: gpu_b_test ran no case under memcheck", {"a": OK, "b": output})

    def test_a_failure(self):
        self.fails("sanitize: a case of gpu_a_test failed under memcheck", {"a": FAILED})
        self.fails("ERROR SUMMARY: 2 errors", {"a": OK}, summary="ERROR SUMMARY: 2 errors")
        self.fails("RACECHECK SUMMARY: 1 hazard", {"a": OK}, tools="racecheck", summary="RACECHECK SUMMARY: 1 hazard displayed")


if __name__ == "__main__":
    unittest.main()
