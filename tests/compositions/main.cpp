// SPDX-License-Identifier: Apache-2.0
// tests/compositions/main.cpp: what other_compositions runs: nothing. That it compiles and links is the test.
int main() {}
