package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// A step is what users, faults, backups and restores do to the world at one time. Its name is its kind and its number
// within the kind, such as "fault/12". Times and choices of a kind follow from the seed and the name alone, so that
// they stay as they are where other steps are left out (Config.Keep).

// draws returns the chance of a step or of a kind of steps.
func (w *World) draws(name string) *rand.Rand {
	d := newDigest
	d.text(name)
	return rand.New(rand.NewPCG(w.cfg.Seed, uint64(d)))
}

// drawing does something with other draws than the world's. What it plans for later draws from the world's again.
func (w *World) drawing(draws *rand.Rand, do func()) {
	w.rng, draws = draws, w.rng
	do()
	w.rng = draws
}

// plan schedules a step, unless it is left out.
func (w *World) plan(at instant, kind string, number int, do func()) {
	name := fmt.Sprintf("%s/%d", kind, number)
	if w.cfg.Keep != nil && !slices.Contains(w.cfg.Keep, name) {
		return
	}
	w.after(at, -1, kind, func() {
		w.result.Steps = append(w.result.Steps, name)
		w.drawing(w.draws(name), do)
	})
}

// again plans steps at random until the end, on average every so often. While the world heals they do nothing.
func (w *World) again(every instant, kind string, do func()) {
	times := w.draws(kind)
	number := 0
	for at := instant(0); ; number++ {
		at += 1 + instant(times.Int64N(int64(2*every)))
		if at >= w.end() {
			return
		}
		w.plan(at, kind, number, func() {
			if !w.healing {
				do()
			}
		})
	}
}

// end is when the world ends.
func (w *World) end() instant {
	if w.cfg.Until > 0 {
		return span(w.cfg.Until)
	}
	return instant(w.cfg.Days) * day
}

// Shrink leaves out what a violation does not need: it returns a world of fewer steps, which breaks the same law at the
// same time or earlier, and how. It runs at most so many worlds.
func Shrink(cfg Config, found *Violation, runs int) (Config, *Violation) {
	lasts := func(v *Violation) time.Duration { return v.At.Sub(genesis()) + time.Microsecond }
	cfg.Until = lasts(found)
	result, _ := Run(cfg)
	minimal := Minimize(result.Steps, runs-1, func(kept []string) bool {
		smaller := cfg
		smaller.Keep = append([]string{}, kept...) // not nil, which keeps all
		_, err := Run(smaller)
		v, broken := err.(*Violation) //nolint:errorlint // Run wraps nothing
		if !broken || v.Law != found.Law {
			return false
		}
		found, cfg.Until = v, lasts(v)
		return true
	})
	cfg.Keep = append([]string{}, minimal...)
	return cfg, found
}

// Minimize leaves out of a list what its property does not need, in ever smaller pieces, and calls the property at most
// so many times. Where that sufficed, none of what it returns can be left out alone.
func Minimize(list []string, calls int, holds func([]string) bool) []string {
	list = slices.Clone(list)
	for size := max(len(list)/2, 1); ; {
		progress := false
		// The last steps first: what they need came before them.
		for to := len(list); to > 0; to -= size {
			if calls--; calls < 0 {
				return list
			}
			from := max(to-size, 0)
			if rest := slices.Concat(list[:from], list[to:]); holds(rest) {
				list, progress = rest, true
			}
		}
		if size == 1 && !progress || len(list) == 0 {
			return list
		}
		if !progress || size > len(list) {
			size = max(min(size, len(list))/2, 1)
		}
	}
}
