package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Search drives a load up until an objective fails.
type Search struct {
	// Start is the first load, Max the highest that is tried.
	Start, Max float64
	// Resolution ends the search: the lowest load that fails is at most so many times the highest that holds.
	Resolution float64
	// OnlyUp is for a load that cannot be lowered again: it grows by Resolution instead of being doubled and bisected.
	OnlyUp bool
	// Whole loads are whole numbers.
	Whole bool
}

// Objective is what must hold under a load.
type Objective struct {
	Name string
	// Got must not exceed Limit; both are in Unit.
	Got, Limit float64
	Unit       string
}

func (o Objective) missed() bool { return o.Got > o.Limit || math.IsNaN(o.Got) }

func (o Objective) String() string {
	return fmt.Sprintf("%s %s %s (limit %s)", o.Name, number(o.Got), o.Unit, number(o.Limit))
}

// Trial is what one load gave.
type Trial struct {
	Load       float64
	Objectives []Objective
	Use        Use
	// Calls are the times of the API's callers, in milliseconds.
	Calls Samples
	// Profile says where the hub spent its time; empty where nothing failed or nothing can tell.
	Profile string
}

// missed are the objectives that failed.
func (t Trial) missed() []string {
	var out []string
	for _, o := range t.Objectives {
		if o.missed() {
			out = append(out, o.String())
		}
	}
	return out
}

// Knee is where a system breaks.
type Knee struct {
	// Holds is the highest load at which every objective held; its Load is 0 where none did.
	Holds Trial
	// Breaks is the lowest load at which one failed; its Load is 0 where none did up to Search.Max.
	Breaks Trial
	// Tried are all loads, in the order of their trials.
	Tried []float64
}

// minShare of Start is the lowest load that is tried.
const minShare = 1.0 / 16

// find doubles the load until an objective fails twice, then bisects between the highest load that held and the lowest
// that failed. Where Start fails, it goes down by halves first.
func (s Search) find(try func(load float64) (Trial, error)) (Knee, error) {
	var k Knee
	for load := s.Start; load > 0; load = s.next(k) {
		t, err := try(load)
		if err == nil && len(t.missed()) > 0 {
			t, err = try(load) // once may be an accident
		}
		if err != nil {
			return k, fmt.Errorf("at %s: %w", number(load), err)
		}
		t.Load = load
		k.Tried = append(k.Tried, load)
		if len(t.missed()) > 0 {
			k.Breaks = t
		} else {
			k.Holds = t
		}
	}
	return k, nil
}

// next is the load to try after what is known; 0 ends the search.
func (s Search) next(k Knee) float64 {
	holds, breaks := k.Holds.Load, k.Breaks.Load
	var load float64
	switch {
	case s.OnlyUp && breaks > 0, s.OnlyUp && holds >= s.Max, breaks == 0 && holds >= s.Max:
		return 0
	case s.OnlyUp:
		load = min(holds*s.Resolution, s.Max)
	case breaks == 0:
		load = min(holds*2, s.Max)
	case holds == 0:
		if load = breaks / 2; load < s.Start*minShare {
			return 0
		}
	case breaks/holds <= s.Resolution:
		return 0
	default:
		load = math.Sqrt(holds * breaks)
	}
	if s.Whole {
		load = math.Round(load)
	}
	if slices.Contains(k.Tried, load) {
		return 0
	}
	return load
}

// result is the line of a knee: the highest load that held, what failed above it, what limited it and what comes next.
func (k Knee) result(r Result, unit string) Result {
	r.Unit = unit
	notes := []string{"tried: " + loads(k.Tried)}
	at := k.Breaks
	if at.Load > 0 {
		limit := at.Use.limit()
		notes = append(notes, fmt.Sprintf("at %s fails: %s", number(at.Load), strings.Join(at.missed(), "; ")),
			"limited by "+limit.What, "next step: "+limit.Next)
		if at.Profile != "" {
			notes = append(notes, "hub's processor time there: "+at.Profile)
		}
	} else {
		at = k.Holds
		notes = append(notes, "no objective fails up to the highest load that was tried")
	}
	for _, o := range k.Holds.Objectives {
		r.Parts = append(r.Parts, Part{Name: "holds: " + o.Name + ", " + o.Unit, Value: o.Got})
	}
	r.Parts = append(r.Parts, Part{Name: "lowest load that fails", Value: k.Breaks.Load})
	r.Parts = append(r.Parts, at.Use.parts()...)
	if r.Note != "" {
		notes = append([]string{r.Note}, notes...)
	}
	r.Note = strings.Join(notes, ". ")
	return r.single(k.Holds.Load)
}

// times is the same knee in smaller units.
func (k Knee) times(n float64) Knee {
	k.Holds.Load *= n
	k.Breaks.Load *= n
	k.Tried = slices.Clone(k.Tried)
	for i := range k.Tried {
		k.Tried[i] *= n
	}
	return k
}

func loads(all []float64) string {
	var out []string
	for _, l := range all {
		out = append(out, number(l))
	}
	return strings.Join(out, ", ")
}
