//go:build race

package network

import "github.com/sasha-s/go-deadlock"

// quietLockChecker switches off go-cni's own lock checker, which it brings along under the race detector only: on current Go
// versions it takes all goroutines for one, and ends the program over two networks that are made at the same time.
func quietLockChecker() { deadlock.Opts.Disable = true }
