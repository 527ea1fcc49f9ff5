//go:build !failpoint

// Package failpoint marks the steps between which a program may be killed, so that a test can kill it at each of them.
// It owns the marks and their list; what must hold afterwards is the tests' business. Without the build tag failpoint a
// mark compiles to nothing, and no program that is shipped is built with it.
package failpoint

// Hit marks a step by its name, a string literal that stands in Names and nowhere else in the code.
func Hit(string) {}
