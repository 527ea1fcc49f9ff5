package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// generatedRun is a run of generated mutants.
type generatedRun struct {
	options
	tree        *tree
	suite       *suite
	equivalents map[string]string
	// stale are the names of equivalents that no candidate has.
	stale map[string]string

	mu     sync.Mutex
	counts map[string]int
	faults []error
}

// made is a chosen candidate with the content of its file.
type made struct {
	*candidate
	source []byte
}

// runGenerated makes the sample's mutants and returns an error for those that survive.
func runGenerated(ctx context.Context, o options) error {
	t, err := loadTree(ctx)
	if err != nil {
		return err
	}
	equivalents, err := readEquivalents("e2e/mutants/equivalent.txt")
	if err != nil {
		return err
	}
	quotas, err := readQuotas("e2e/mutants/sample.txt")
	if err != nil {
		return err
	}
	r := &generatedRun{
		options: o, tree: t, suite: newSuite(quotas), equivalents: equivalents,
		stale: maps.Clone(equivalents), counts: map[string]int{},
	}
	var all []made
	for _, q := range quotas {
		chosen, err := r.sample(q)
		if err != nil {
			return err
		}
		all = append(all, chosen...)
	}
	if len(r.stale) > 0 && o.all {
		return fmt.Errorf("e2e/mutants/equivalent.txt names changes that are none of the code: %s",
			strings.Join(slices.Sorted(maps.Keys(r.stale)), ", "))
	}
	if o.list {
		for _, m := range all {
			fmt.Printf("%s  %s\n", m.name(), m.describe())
		}
		fmt.Printf("%d generated mutants\n", len(all))
		return nil
	}
	r.each(ctx, all)
	fmt.Printf("%d generated mutants: %d noticed, %d of them by a timeout; %d survived, %d equivalent, %d without a "+
		"verdict\n", len(all), r.counts["noticed"]+r.counts["timed out"], r.counts["timed out"], r.counts["SURVIVED"],
		r.counts["equivalent"], r.counts["FAULT"])
	return errors.Join(r.faults...)
}

// sample chooses the package's mutants.
func (r *generatedRun) sample(q quota) ([]made, error) {
	number := q.short
	if r.all {
		number = q.all
	}
	if number == 0 {
		return nil, nil
	}
	c, err := r.tree.check(q.dir)
	if err != nil {
		return nil, err
	}
	sourceOf := func(m *candidate) []byte { return c.sources[slices.Index(c.names, m.file)] }
	compiles := func(m *candidate) bool {
		if r.equivalents[m.name()] != "" && !r.all {
			return false // the short sample spends its time on others
		}
		return c.compiles(m.file, m.apply(sourceOf(m)))
	}
	candidates := c.candidates()
	for _, m := range candidates {
		delete(r.stale, m.name())
	}
	var all []made
	for _, m := range choose(candidates, number, r.seed, compiles) {
		if r.match.MatchString(m.name()) {
			all = append(all, made{m, m.apply(sourceOf(m))})
		}
	}
	return all, nil
}

// each runs the mutants, in their order, a few at a time.
func (r *generatedRun) each(ctx context.Context, all []made) {
	var wait sync.WaitGroup
	places := make(chan struct{}, r.jobs)
	for _, m := range all {
		places <- struct{}{}
		wait.Go(func() {
			defer func() { <-places }()
			if ctx.Err() == nil {
				r.one(ctx, m)
			}
		})
	}
	wait.Wait()
}

func (r *generatedRun) one(ctx context.Context, m made) {
	if reason := r.equivalents[m.name()]; reason != "" {
		r.report("equivalent", m, reason, 0)
		return
	}
	begin := time.Now()
	v, err := r.judge(ctx, m)
	took := time.Since(begin)
	switch {
	case err != nil:
		r.report("FAULT", m, err.Error(), took)
	case v.timedOut:
		r.report("timed out", m, v.by, took)
	case v.noticed:
		r.report("noticed", m, v.by, took)
	default:
		r.report("SURVIVED", m, m.describe(), took)
	}
}

func (r *generatedRun) judge(ctx context.Context, m made) (verdict, error) {
	dir, remove, err := overlayDir()
	if err != nil {
		return verdict{}, err
	}
	defer remove()
	overlay, err := writeOverlay(dir, map[string][]byte{filepath.Join(m.dir, m.file): m.source})
	if err != nil {
		return verdict{}, err
	}
	near, err := r.tree.neighbours(m.dir, r.neighbours)
	if err != nil {
		return verdict{}, err
	}
	return r.suite.notices(ctx, overlay, append([]string{m.dir}, near...))
}

// report prints what became of a mutant and counts it.
func (r *generatedRun) report(what string, m made, detail string, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.counts[what]++
	fmt.Printf("%-10s %s (%s) %.0fs\n", what, m.name(), detail, took.Seconds())
	if what == "SURVIVED" || what == "FAULT" {
		r.faults = append(r.faults, fmt.Errorf("%s %s: %s", what, m.name(), detail))
	}
}

// options are the command's flags.
type options struct {
	match                              *regexp.Regexp
	all, list, patches, generated, e2e bool
	jobs                               int
	// neighbours bounds the packages beside its own whose tests a mutant must pass to survive.
	neighbours int
	seed       string
}
