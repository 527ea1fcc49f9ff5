package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
	case name == "get" && len(args) == 1:
		return get(args[0])
	case name == "-c" && len(args) > 2:
		return install(args[1], args[3:])
	case name == "wait":
		fmt.Println("waiting")
		time.Sleep(maxSlow)
		return 0
	}
	fmt.Fprintln(os.Stderr, "cat, exit CODE, get URL, zeroes, size, or wait")
	return 2
}

// get prints what the URL answers.
func get(url string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		fmt.Fprintln(os.Stderr, resp.Status)
		return 1
	}
	return 0
}

// install stands in for Python with pip, which the demo's image does not have: it makes an empty file for each
// requirement where pip would put the package. Some names fail on purpose.
func install(environment string, requirements []string) int {
	packages := filepath.Join(environment, "lib", "python3.11", "site-packages")
	if err := os.MkdirAll(packages, 0o755); err != nil {
		fmt.Println(err)
		return 1
	}
	for _, one := range requirements {
		switch one {
		case "missing":
			config, _ := os.ReadFile(os.Getenv("PIP_CONFIG_FILE"))
			fmt.Printf("%s\n%s\nno matching distribution found for %s\n", strings.Repeat("━", 400), config, one)
			return 1
		case "slow":
			fmt.Println("installing for ever")
			time.Sleep(maxSlow)
		}
		if err := os.WriteFile(filepath.Join(packages, one), nil, 0o644); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	return 0
}
