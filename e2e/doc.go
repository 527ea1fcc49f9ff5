// Package e2e holds the end-to-end tests: the real programs, containerd, PostgreSQL, network and browser, seen from
// outside. Packages beside it start and drive them. There is no production code here.
package e2e
