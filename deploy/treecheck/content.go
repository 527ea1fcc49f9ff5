package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"path"
	"regexp"
)

const (
	// maxFileBytes bounds a tracked file: what is built is not kept in the repository.
	maxFileBytes = 2 << 20
	// maxUnpackedBytes bounds what is read of a compressed file.
	maxUnpackedBytes = 64 << 20
)

var (
	// privateKey is a PEM block of a private key with at least one line of its content (RFC 7468), or an age identity.
	privateKey = regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----\s*\n\s*[A-Za-z0-9+/=]{64}|` +
		`AGE-SECRET-KEY-(PQ-)?1[A-Z0-9]{50}`)
	// kernelRelease is what `uname -r` prints: a version with the build's own name behind it.
	kernelRelease = regexp.MustCompile(`\b\d+\.\d+\.\d+-[\w.+-]+|"kernel"`)
)

func checkSize(file string, content []byte) error {
	if len(content) > maxFileBytes {
		return fmt.Errorf("%s has %d bytes; a tracked file has at most %d", file, len(content), maxFileBytes)
	}
	return nil
}

// checkMachine reports a kernel's name in the benchmark's results: it says nothing about the numbers, but much about
// the machine.
func checkMachine(file string, content []byte) error {
	if file != "bench/results.json" {
		return nil
	}
	if name := kernelRelease.Find(content); name != nil {
		return fmt.Errorf("%s names a kernel: %s", file, name)
	}
	return nil
}

// checkKeys reports private keys, also in compressed files and archives.
func checkKeys(file string, content []byte) error {
	if privateKey.Match(content) || path.Ext(file) == ".key" {
		return fmt.Errorf("%s holds a private key; a test makes its keys itself", file)
	}
	if path.Ext(file) != ".gz" && path.Ext(file) != ".tgz" {
		return nil
	}
	compressed, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	unpacked, err := io.ReadAll(io.LimitReader(compressed, maxUnpackedBytes))
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	var problems []error
	if privateKey.Match(unpacked) {
		problems = append(problems, fmt.Errorf("%s holds a private key; a test makes its keys itself", file))
	}
	archive := tar.NewReader(bytes.NewReader(unpacked))
	for {
		header, err := archive.Next()
		if err != nil {
			return errors.Join(problems...) // the end, or it is no archive
		}
		if path.Ext(header.Name) == ".key" {
			problems = append(problems, fmt.Errorf("%s holds the key %s; a test makes its keys itself", file, header.Name))
		}
	}
}
