package manifest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

const weights = "org/acme/jupyter/weights@sha256:3333333333333333333333333333333333333333333333333333333333333333"

// withImageMounts is the jupyter manifest with mounts of images; each is "reference path".
func withImageMounts(t *testing.T, mounts ...string) string {
	t.Helper()
	text := "    image_mounts:\n"
	for _, m := range mounts {
		ref, path, _ := strings.Cut(m, " ")
		text += "      - {image_ref: \"" + ref + "\", path: " + path + "}\n"
	}
	return withVolumes(t, text)
}

func TestImageMountsAreSignedAndAdmitted(t *testing.T) {
	doc := withImageMounts(t, weights+" /models")
	m, err := manifest.Parse([]byte(doc))
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureImageMounts)
	require.Contains(t, manifest.KnownFeatures(), manifest.FeatureImageMounts)
	require.Contains(t, m.Images(), manifest.Image{
		Pointer: "/version/runtime_profile/image_mounts/0/image_ref", Ref: weights,
	})
	for what, change := range map[string]func(*protocol.Service){
		"another image": func(s *protocol.Service) { s.ImageMounts[0].Image = s.GetImage() },
		"another path":  func(s *protocol.Service) { s.ImageMounts[0].Path = "/usr" },
		"none":          func(s *protocol.Service) { s.ImageMounts = nil },
	} {
		t.Run(what, func(t *testing.T) {
			env, verified := newWorld(t, "org/acme/", "acme").verify(t, doc)
			w := admittedWorkload(t, env, verified)
			require.NoError(t, manifest.Admits(verified, w))
			change(w.GetServices()[0])
			require.Error(t, manifest.Admits(verified, w))
		})
	}
}

func TestManifestThatMisplacesAnImageMountIsRefused(t *testing.T) {
	other := strings.Replace(weights, "/jupyter/", "/other/", 1)
	for why, doc := range map[string]string{
		"not a repository of this app": withImageMounts(t, other+" /models"),
		"platform's own":               withImageMounts(t, weights+" /proc/models"),
		"neither /etc":                 withImageMounts(t, weights+" /run"),
		"clean absolute path":          withImageMounts(t, weights+" /models/../x"),
		"lies in another volume":       withImageMounts(t, weights+" /models", weights+" /models/b"),
		"or scratch directory":         withImageMounts(t, weights+" /tmp/models"),
		"image_ref":                    withImageMounts(t, "docker.io/library/x:latest /models"),
		"more than 8":                  withImageMounts(t, strings.Split(strings.Repeat(weights+" /m,", 9), ",")[:9]...),
	} {
		_, err := manifest.Parse([]byte(doc))
		require.Error(t, err, why)
		var found []string
		for _, f := range fault.As(err).Fields {
			found = append(found, f.Pointer+" "+f.Reason)
		}
		if why != "more than 8" {
			require.Contains(t, strings.Join(found, "\n"), why)
		}
	}
}
