package notify_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/notify"
)

func signalled(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestAChangeWakesTheSubscribersOfItsTopicAndNoOthers(t *testing.T) {
	var topics notify.Topics
	topics.Notify("a") // without subscribers
	one, cancel := topics.Subscribe("a")
	two, _ := topics.Subscribe("a")
	other, _ := topics.Subscribe("b")
	require.Equal(t, 3, topics.Subscribers())
	topics.Notify("a", "c")
	topics.Notify("a") // merged with the signal that was not taken yet
	require.True(t, signalled(one))
	require.False(t, signalled(one))
	require.True(t, signalled(two))
	require.False(t, signalled(other))
	cancel()
	cancel()
	require.Equal(t, 2, topics.Subscribers())
	topics.Notify("a")
	require.False(t, signalled(one))
	require.True(t, signalled(two))
	topics.Close()
	require.True(t, topics.Closed())
	require.True(t, signalled(two))
	require.True(t, signalled(other))
	none, cancel := topics.Subscribe("a")
	require.Nil(t, none)
	cancel()
}

func TestSubscribersAreBounded(t *testing.T) {
	var topics notify.Topics
	first, cancel := topics.Subscribe("a")
	require.NotNil(t, first)
	last := first
	for last != nil {
		last, _ = topics.Subscribe("b")
	}
	cancel()
	again, _ := topics.Subscribe("c")
	require.NotNil(t, again)
}
