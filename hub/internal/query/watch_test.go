package query

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

func TestAReadAnswersAtOnceWithoutAWaitOrWithAnotherVersion(t *testing.T) {
	s := &Service{DB: new(db.DB), pollInterval: time.Hour}
	reads := 0
	read := func() (string, int64, error) {
		reads++
		return "v", 3, nil
	}
	for _, w := range []Watch{
		{},
		{After: 3},
		{Wait: time.Hour},
		{After: 2, Wait: time.Hour},
		{After: 9, Wait: time.Hour},
	} {
		got, err := await(t.Context(), s, "a", w, read)
		require.NoError(t, err)
		require.Equal(t, "v", got)
	}
	require.Equal(t, 5, reads)
	require.Zero(t, s.DB.Changes().Subscribers())
}

// A change between the first read and the wait is not missed.
func TestAReadIsWokenByAChangeThatItHasNotSeen(t *testing.T) {
	s := &Service{DB: new(db.DB), pollInterval: time.Hour}
	version := int64(3)
	got, err := await(t.Context(), s, "a", Watch{After: 3, Wait: time.Hour}, func() (int64, int64, error) {
		read := version
		version = 4
		s.DB.Changes().Notify("a")
		return read, read, nil
	})
	require.NoError(t, err)
	require.EqualValues(t, 4, got)
}

// Watchers of what does not change cost little: they rely on the signal, which comes at once however long they wait.
func TestAReadThatWaitsLongPollsSeldom(t *testing.T) {
	for _, c := range []struct {
		unsignalled bool
		reads       int
	}{{false, 1 + 5 + 1}, {true, 1 + 29 + 1}} { // after 1, 3, 7, 15 and 23 s, or every second; and at the end
		synctest.Test(t, func(t *testing.T) {
			s := &Service{DB: new(db.DB)}
			reads := 0
			_, err := await(t.Context(), s, "a", Watch{After: 3, Wait: 29500 * time.Millisecond, unsignalled: c.unsignalled},
				func() (string, int64, error) {
					reads++
					return "same", 3, nil
				})
			require.NoError(t, err)
			require.Equal(t, c.reads, reads)
		})
	}
}

func TestAWaitEnds(t *testing.T) {
	s := &Service{DB: new(db.DB)}
	same := func() (string, int64, error) { return "same", 3, nil }
	got, err := await(t.Context(), s, "a", Watch{After: 3, Wait: time.Millisecond}, same)
	require.NoError(t, err)
	require.Equal(t, "same", got)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = await(ctx, s, "a", Watch{After: 3, Wait: time.Hour}, same)
	require.ErrorIs(t, err, context.Canceled)

	// Another process made the change, and no signal comes.
	s.pollInterval = time.Millisecond
	version := int64(2)
	_, err = await(t.Context(), s, "a", Watch{After: 3, Wait: time.Hour}, func() (string, int64, error) {
		version++
		return "", version, nil
	})
	require.NoError(t, err)
	require.EqualValues(t, 4, version)
}

// Each read checks access: one that is lost ends the wait.
func TestAWaitEndsWhenAccessIsLost(t *testing.T) {
	s := &Service{DB: new(db.DB), pollInterval: time.Millisecond}
	denied := errors.New("denied")
	reads := 0
	_, err := await(t.Context(), s, "a", Watch{After: 3, Wait: time.Hour}, func() (string, int64, error) {
		if reads++; reads > 2 {
			return "", 0, denied
		}
		return "", 3, nil
	})
	require.ErrorIs(t, err, denied)
	s.DB.Changes().Close()
	_, err = await(t.Context(), s, "a", Watch{After: 3, Wait: time.Hour}, func() (string, int64, error) {
		return "", 3, nil
	})
	require.NoError(t, err, "a hub that stops keeps no one waiting")
}
