package main

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// seed fixes the choice among the candidates. With another one others are chosen: `-seed` finds what this one does
// not.
const seed = "gpuaas"

// quota is how many of a package's candidates are taken in all, and how many of them the short sample takes.
type quota struct {
	dir        string
	all, short int
	// limit bounds the package's tests with a mutant; zero means packageLimit.
	limit time.Duration
}

// readQuotas reads lines of a directory, two numbers and perhaps a limit; # begins a comment.
func readQuotas(path string) ([]quota, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var quotas []quota
	for line := range lines(raw) {
		fields := strings.Fields(line)
		if len(fields) < 3 || len(fields) > 4 {
			return nil, fmt.Errorf("%s: %q is not a package, two numbers and perhaps a limit", path, line)
		}
		all, err := strconv.Atoi(fields[1])
		short, err2 := strconv.Atoi(fields[2])
		q := quota{dir: fields[0], all: all, short: short}
		var err3 error
		if len(fields) == 4 {
			q.limit, err3 = time.ParseDuration(fields[3])
		}
		if err := errors.Join(err, err2, err3); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		quotas = append(quotas, q)
	}
	return quotas, nil
}

// readEquivalents reads lines of a mutant's name, a colon and the reason why it changes nothing that is promised.
func readEquivalents(path string) (map[string]string, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	reasons := map[string]string{}
	for line := range lines(raw) {
		name, reason, ok := strings.Cut(line, " ")
		if !ok || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s: %q gives no reason", path, line)
		}
		if reasons[name] != "" {
			return nil, fmt.Errorf("%s: %s is listed twice", path, name)
		}
		reasons[name] = strings.TrimSpace(reason)
	}
	return reasons, nil
}

// lines yields the lines that are neither empty nor comments.
func lines(raw []byte) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for scanner := bufio.NewScanner(bytes.NewReader(raw)); scanner.Scan(); {
			line := strings.TrimSpace(scanner.Text())
			if line != "" && !strings.HasPrefix(line, "#") && !yield(line) {
				return
			}
		}
	}
}

// maxInFunction bounds the mutants of one function, so that a long one does not fill its package's quota.
const maxInFunction = 2

// choose takes n of the candidates. A candidate's rank follows from the seed, its name and its kind alone: a change
// elsewhere in the package moves no other in or out, except for the one that takes its place.
func choose(all []*candidate, n int, seed string, compiles func(*candidate) bool) []*candidate {
	weights := kindWeights()
	rank := map[*candidate]float64{}
	for _, c := range all {
		rank[c] = exponential(seed+"|"+c.name()) / weights[c.kind]
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b *candidate) int { return cmp.Compare(rank[a], rank[b]) })
	inFunction := map[string]int{}
	var chosen []*candidate
	for _, c := range all {
		key := c.file + ":" + c.function
		if len(chosen) == n || inFunction[key] == maxInFunction || !compiles(c) {
			continue
		}
		inFunction[key]++
		chosen = append(chosen, c)
	}
	return chosen
}

// exponential is a number with an exponential distribution that follows from the text: divided by weights, the smallest
// ones are a weighted sample.
func exponential(text string) float64 {
	sum := sha256.Sum256([]byte(text))
	uniform := (float64(binary.BigEndian.Uint64(sum[:8])>>11) + 0.5) / (1 << 53)
	return -math.Log(uniform)
}
