// Package harness sets up what the end-to-end tests need and drives it from outside: hubs, nodes and containerd of the
// real programs in a sandbox, a tenant with an app, a network of namespaces, and oracles that say what really ran. A
// test reads as a list of its steps; what is checked in one package only stands beside its test.
package harness
