package main

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// fabricate makes pairs whose commits differ by a factor, on a machine that drifts and disturbs single measurements.
func fabricate(seed uint64, n int, unit string, factor float64) pairs {
	random, p := rand.New(rand.NewPCG(seed, 1)), pairs{}
	noise := func() float64 { return 1 + 0.03*random.NormFloat64() }
	for i := range n {
		drift := 100 * (1 + 0.5*float64(i)/float64(n))
		a, b := drift*noise(), drift*factor*noise()
		switch random.IntN(20) {
		case 0:
			a *= 3
		case 1:
			b *= 3
		}
		p.add([]line{{"x", unit, a}}, []line{{"x", unit, b}})
	}
	return p
}

// share is how many of a hundred comparisons say so.
func share(says string, n int, unit string, factor float64) (count int) {
	for seed := range uint64(100) {
		if fabricate(seed, n, unit, factor).judge()[0].says == says {
			count++
		}
	}
	return count
}

func TestARegressionIsToldFromNoise(t *testing.T) {
	require.GreaterOrEqual(t, share(saysWorse, 20, "ms", 1.10), 95)
	require.GreaterOrEqual(t, share(saysBetter, 20, "ms", 0.85), 95)
	require.GreaterOrEqual(t, share(saysBetter, 20, "requests/s", 1.10), 95)
	require.GreaterOrEqual(t, share(saysWorse, 20, "requests/s", 0.85), 95)
}

func TestEqualCommitsSeldomDiffer(t *testing.T) {
	for _, n := range []int{10, 20, 40} {
		require.GreaterOrEqual(t, share(saysNoise, n, "ms", 1), 90, "%d pairs", n)
	}
}

func TestTooFewPairsShowNothing(t *testing.T) {
	for n := 1; n <= 5; n++ {
		require.Equal(t, saysTooFew, fabricate(1, n, "ms", 2).judge()[0].says)
	}
	six := pairs{}
	for i := range 6 {
		six.add([]line{{"x", "ms", 10}}, []line{{"x", "ms", 20 + float64(i)}})
	}
	require.True(t, anyWorse(six.judge()))
}

func TestTheIntervalIsWiderTheMoreLinesAreCompared(t *testing.T) {
	one, many := fabricate(1, 12, "ms", 1), fabricate(1, 12, "ms", 1)
	for _, name := range []string{"b", "c", "d", "e", "f", "g", "h"} {
		many[name] = many["x"]
	}
	x := len(many) - 1
	require.Greater(t, many.judge()[x].hi-many.judge()[x].lo, one.judge()[0].hi-one.judge()[0].lo)
}

func TestALineOfOneCommitAloneHasNoRatio(t *testing.T) {
	p := pairs{}
	p.add([]line{{"a", "ms", 1}, {"zero", "requests", 0}}, []line{{"b", "ms", 1}, {"zero", "requests", 0}})
	require.Empty(t, p.judge())
	var out bytes.Buffer
	require.NoError(t, show(&out, fabricate(1, 10, "ms", 2).judge()))
	require.Contains(t, out.String(), saysWorse)
}
