// Command pythonsdk writes the Python SDK's types and operations from the contract, and its wheel. It prints code; what
// the code does at run time is in client.py.
package main

import (
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pythonsdk:", err)
		os.Exit(1)
	}
}

// run writes gpuaas/api_gen.py from the contract, or a wheel of the package into a directory.
func run(args []string) error {
	switch {
	case len(args) == 3 && args[0] == "api":
		text, err := os.ReadFile(args[1])
		if err != nil {
			return err
		}
		code, err := Python(text)
		if err != nil {
			return err
		}
		return os.WriteFile(args[2], code, 0o644)
	case len(args) == 3 && args[0] == "wheel":
		name, wheel, err := Wheel(args[1])
		if err != nil {
			return err
		}
		if err := os.MkdirAll(args[2], 0o755); err != nil {
			return err
		}
		path := filepath.Join(args[2], name)
		fmt.Println(path)
		return os.WriteFile(path, wheel, 0o644)
	}
	return fmt.Errorf("usage: pythonsdk api CONTRACT FILE | wheel PACKAGE DIRECTORY")
}
