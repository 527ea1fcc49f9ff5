package fault_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestAnErrorWithoutAFaultIsInternalAndItsTextStaysInTheLog(t *testing.T) {
	cause := errors.New("password=hunter2")
	f := fault.As(fmt.Errorf("dial: %w", cause))
	require.Equal(t, fault.Internal, f.Kind)
	require.NotContains(t, f.Public, "hunter2")
	require.ErrorIs(t, f, cause, "the log shows the cause")
	require.ErrorContains(t, f, "hunter2")
}

func TestAFaultIsFoundThroughWrapping(t *testing.T) {
	f := fault.New(fault.Conflict, "disk_full", "No space.", nil)
	err := fmt.Errorf("pull: %w", f)
	require.Same(t, f, fault.As(err))
	require.True(t, fault.Is(err, fault.Conflict))
	require.False(t, fault.Is(err, fault.NotFound))
	require.False(t, fault.Is(errors.New("other"), fault.Internal), "an error without a fault has no kind")
	require.EqualError(t, f, "disk_full: No space.")
}

func TestOptionsReturnCopies(t *testing.T) {
	f := fault.New(fault.Unavailable, "disk_full", "No space.", nil)
	one := f.WithField("/a", "is missing")
	left, right := one.WithHint("/b", "is wrong", "write 1"), one.WithField("/c", "is wrong")
	require.Empty(t, f.Fields)
	require.Equal(t, []fault.Field{
		{Pointer: "/a", Reason: "is missing"}, {Pointer: "/b", Reason: "is wrong", Hint: "write 1"},
	}, left.Fields, "copies of one fault do not share fields")
	require.Equal(t, "/c", right.Fields[1].Pointer)

	require.True(t, fault.IsPermanent(fmt.Errorf("start: %w", f.Permanent())))
	require.Equal(t, time.Second, f.RetryAfter(time.Second).RetryDelay)
	require.False(t, fault.IsPermanent(f))
	require.Zero(t, f.RetryDelay)
}
