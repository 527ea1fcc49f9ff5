package cli

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func TestPullOfSaysWhatTheSlowestMemberDoes(t *testing.T) {
	pull := func(phase client.ImagePullPhase, done, total int64) client.Member {
		return client.Member{ImagePull: client.ImagePull{Phase: phase, DoneBytes: done << 20, TotalBytes: total << 20}}
	}
	for want, members := range map[string][]client.Member{
		"":                                      {{}},
		"resolving the image":                   {pull(client.ImagePullPhaseResolving, 0, 0)},
		"fetching the image, 12 of 80 MiB":      {pull(client.ImagePullPhaseFetching, 12, 80), {}},
		"fetching the image, 90 of 120 MiB":     {pull(client.ImagePullPhaseUnpacking, 60, 60), pull("fetching", 30, 60)},
		"unpacking the image, 1024 of 1024 MiB": {pull(client.ImagePullPhaseUnpacking, 1024, 1024)},
	} {
		require.Equal(t, want, pullOf(client.AppInstance{Members: members}))
	}
}
