// Package netem impairs the network between nodes and a hub: a proxy for UDP and TCP that loses, delays, reorders,
// duplicates, cuts and rebinds, as the test sets it at run time. A seed decides what happens to each packet. It does
// not read what it carries.
package netem

import (
	"math/rand/v2"
	"time"
)

// Conditions impair the packets of one direction. The zero value lets all packets pass.
type Conditions struct {
	// Loss and Duplicate are the chances of each packet, 0 to 1, to be lost and to come twice.
	Loss, Duplicate float64
	// Bursts loses packets in runs.
	Bursts Gilbert
	// Delay is added to each packet, and up to Jitter more: packets closer than that overtake each other.
	Delay, Jitter time.Duration
	// Cut loses everything.
	Cut bool
}

// Gilbert is the loss model of that name: a good state that loses nothing and a bad one that loses everything, with the
// chances for each packet to go from one to the other (E. N. Gilbert, Capacity of a Burst-Noise Channel, 1960).
type Gilbert struct{ ToBad, ToGood float64 }

// InBursts loses this share of all packets, in bursts of this mean length.
func InBursts(share, meanPackets float64) Gilbert {
	toGood := 1 / meanPackets
	return Gilbert{ToBad: toGood * share / (1 - share), ToGood: toGood}
}

// maxCopies is how often a packet can arrive.
const maxCopies = 2

// fate draws the impairments of the packets of one direction.
type fate struct {
	random *rand.Rand
	bad    bool
}

// newFate gives each direction of each link numbers of its own, so that traffic elsewhere does not change them.
func newFate(seed uint64, link string, direction uint64) *fate {
	mixed := seed
	for _, b := range []byte(link) {
		mixed = mixed*1099511628211 ^ uint64(b)
	}
	return &fate{random: rand.New(rand.NewPCG(mixed, direction))}
}

// next returns when the copies of the next packet arrive, from now; none when it is lost. It draws the same number of
// values whatever the conditions are.
func (f *fate) next(c Conditions) []time.Duration {
	loss, turn, twice := f.random.Float64(), f.random.Float64(), f.random.Float64()
	var late [maxCopies]float64
	for i := range late {
		late[i] = f.random.Float64()
	}
	if f.bad {
		f.bad = turn >= c.Bursts.ToGood
	} else {
		f.bad = turn < c.Bursts.ToBad
	}
	if c.Bursts == (Gilbert{}) {
		f.bad = false
	}
	if c.Cut || f.bad || loss < c.Loss {
		return nil
	}
	copies := 1
	if twice < c.Duplicate {
		copies = maxCopies
	}
	arrivals := make([]time.Duration, copies)
	for i := range arrivals {
		arrivals[i] = c.Delay + time.Duration(late[i]*float64(c.Jitter))
	}
	return arrivals
}
