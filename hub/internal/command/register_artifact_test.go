package command_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// What was registered may have been collected from the registry since.
func TestARepeatedRegistrationIsAnsweredWithoutTheRegistry(t *testing.T) {
	p := newPerson(newWorld(t))
	s := p.Commands()
	s.Bundle = func() protocol.Bundle { return p.Bundle }
	in := artifact.Artifact{
		ProjectID: p.Project.ID, AppSlug: "spare", AppVersion: "1.0.0", ArtifactName: "runtime", Channel: "prod",
	}
	s.Registry, in.Digest = p.pushed(artifact.Repository("acme", in.AppSlug, in.ArtifactName))
	first, err := s.RegisterArtifact(t.Context(), p.Meta("k"), in)
	require.NoError(t, err)
	s.Registry, _ = p.pushed(artifact.Repository("acme", in.AppSlug, "other"))
	again, err := s.RegisterArtifact(t.Context(), p.Meta("k"), in)
	require.NoError(t, err)
	require.Equal(t, first.ID, again.ID)
	require.Equal(t, first.SizeBytes, again.SizeBytes)
	_, err = s.RegisterArtifact(t.Context(), p.Meta("other"), in)
	require.True(t, fault.Is(err, fault.Unprocessable), "a new request reads the registry: %v", err)
}
