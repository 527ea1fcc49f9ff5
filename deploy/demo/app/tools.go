package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// runTool runs the program as a command in its own container, where there is no other program.
func runTool(name string, args []string) int {
	switch {
	case name == "cat":
		if _, err := io.Copy(os.Stdout, os.Stdin); err != nil {
			return 1
		}
		return 0
	case name == "exit" && len(args) == 1:
		fmt.Fprintln(os.Stderr, "exiting")
		code, _ := strconv.Atoi(args[0])
		return code
	case name == "zeroes":
		for piece := make([]byte, 64<<10); ; {
			if _, err := os.Stdout.Write(piece); err != nil {
				return 1
			}
		}
	case name == "size":
		size, err := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
		if err != nil {
			fmt.Println("no terminal")
			return 0
		}
		fmt.Println(size.Row, size.Col)
		return 0
	case name == "wait":
		fmt.Println("waiting")
		time.Sleep(maxSlow)
		return 0
	}
	fmt.Fprintln(os.Stderr, "cat, exit CODE, zeroes, size, or wait")
	return 2
}
