package compose_test

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/compose"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// options names an image in the platform's registry for each example image of a file.
func options(file []byte) compose.Options {
	images := map[string]string{}
	for _, match := range regexp.MustCompile(`image: (example/([a-z]+):[0-9]+)`).FindAllSubmatch(file, -1) {
		images[string(match[1])] = fmt.Sprintf("org/acme/corpus/%s@sha256:%x", match[2], sha256.Sum256(match[1]))
	}
	return compose.Options{Slug: "corpus", Version: "1.0.0", Images: images}
}

// Each file of the corpus covers what its first line names. A supported one has its manifest beside it, another one the
// keys that are refused.
func TestEveryFileOfTheCorpusIsConvertedOrRefusedByKeyAndLine(t *testing.T) {
	files, err := filepath.Glob("testdata/corpus/*.yaml")
	require.NoError(t, err)
	converted := 0
	for _, path := range files {
		if strings.HasSuffix(path, ".manifest.yaml") {
			continue
		}
		t.Run(filepath.Base(path), func(t *testing.T) {
			file, err := os.ReadFile(path)
			require.NoError(t, err)
			require.True(t, strings.HasPrefix(string(file), "# Covers: "))
			opts := options(file)
			if strings.Contains(path, "unpinned") {
				opts.Images = nil
			}
			out, err := compose.Convert(t.Context(), file, opts)
			base := strings.TrimSuffix(path, ".yaml")
			if refused := compose.Refused(nil); errors.As(err, &refused) {
				require.Contains(t, base, "-no-")
				golden(t, base+".refused", []byte(refused.Error()+"\n"))
				return
			}
			require.NoError(t, err)
			require.NotContains(t, base, "-no-")
			converted++
			golden(t, base+".manifest.yaml", out)
			runs(t, out)
		})
	}
	require.GreaterOrEqual(t, converted, 25)
	require.GreaterOrEqual(t, len(files), 30)
}

// runs requires that a node can be told to run what was converted.
func runs(t *testing.T, doc []byte) {
	t.Helper()
	m, err := manifest.Parse(doc)
	require.NoError(t, err)
	require.Contains(t, m.Features(), manifest.FeatureServices)
	var shape manifest.Shape
	if n := m.Version.Compatibility.MinGPUCount; n > 0 {
		shape.AcceleratorVendor = m.Version.Compatibility.SupportedAccelerators[0]
		for i := range n {
			shape.AcceleratorIDs = append(shape.AcceleratorIDs, fmt.Sprint(i))
		}
	}
	services, err := manifest.Lower(m, manifest.Inputs{}, shape)
	require.NoError(t, err)
	require.Len(t, services, len(m.Version.RuntimeProfile.Services))
}

func golden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile(path, got, 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

func TestWhatIsNoComposeFileIsAnError(t *testing.T) {
	for name, text := range map[string]string{
		"no YAML":       "services: [",
		"a list":        "- services",
		"two documents": "services: {}\n---\nservices: {}",
		"empty":         "",
		"too large":     strings.Repeat("#", compose.MaxFileBytes+1),
		"deep":          "services: {web: {image: x, labels: " + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "}}",
		"of other form": "services: {web: {image: [1], ports: {}}}",
		"a bomb": "x-a: &a [1,1,1,1,1,1,1,1,1,1]\nx-b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n" +
			"x-c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nx-d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n" +
			"x-e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nservices: {web: {image: x, command: [*e, *e, *e]}}",
		"an alias of itself": "services: {web: &w {image: x, command: *w}}",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := compose.Convert(t.Context(), []byte(text), compose.Options{Slug: "x", Version: "1"})
			require.Error(t, err)
		})
	}
}

// An app never gets less than its file says: a manifest counts in MiB.
func TestSizesAreRoundedUp(t *testing.T) {
	out, err := compose.Convert(t.Context(), []byte(`services:
  app:
    image: org/acme/corpus/app@sha256:`+strings.Repeat("a", 64)+`
    mem_limit: 200000001b
    shm_size: 1048577b
    tmpfs: ["/tmp:size=1048577"]
    volumes: ["data:/data"]
volumes:
  data: {driver_opts: {size: 2147483649b}}
`), compose.Options{Slug: "corpus", Version: "1.0.0"})
	require.NoError(t, err)
	m, err := manifest.Parse(out)
	require.NoError(t, err)
	s := m.Version.RuntimeProfile.Services[0]
	require.EqualValues(t, 191, s.Resources.MemoryMiB.Default)
	require.EqualValues(t, 2, s.Resources.ShmMiB.Default)
	require.EqualValues(t, 2, s.Scratch[0].SizeMiB)
	require.EqualValues(t, 2049, s.Volumes[0].SizeMiB.Default)
}

// A size that is too large must not become none, which would leave the service with a default.
func TestASizeThatNoManifestHasIsRefused(t *testing.T) {
	for _, size := range []string{
		"9223372036854775807b", "9223372036854775807", "9223372036854775000", "8589934592g", "-1",
	} {
		for key, text := range map[string]string{
			"mem_limit":       "mem_limit: SIZE",
			"mem_reservation": "mem_reservation: SIZE",
			"shm_size":        "shm_size: SIZE",
			"tmpfs":           `tmpfs: ["/tmp:size=SIZE"]`,
			"cpus":            "cpus: 1e30",
			"no number":       "cpus: .nan",
		} {
			out, err := compose.Convert(t.Context(), []byte(`services:
  app:
    image: org/acme/corpus/app@sha256:`+strings.Repeat("a", 64)+`
    `+strings.ReplaceAll(text, "SIZE", size)+`
`), compose.Options{Slug: "corpus", Version: "1.0.0"})
			require.Error(t, err, "%s of %s: %s", key, size, out)
		}
	}
}

// A manifest counts seconds in 32 bits.
func TestAGraceThatNoManifestHasIsRefused(t *testing.T) {
	out, err := compose.Convert(t.Context(), []byte(`services:
  app:
    image: org/acme/corpus/app@sha256:`+strings.Repeat("a", 64)+`
    stop_grace_period: 4294967306s
`), compose.Options{Slug: "corpus", Version: "1.0.0"})
	if err == nil {
		_, err = manifest.Parse(out)
	}
	require.ErrorContains(t, err, "grace")
}

// Compose keeps cores as 32-bit numbers, in which 0.1 is a bit more than it is.
func TestCoresAreWhatTheFileSays(t *testing.T) {
	for cores, millis := range map[string]uint64{
		"0.1": 100, "0.3": 300, "0.57": 570, "1.1": 1100, "2.3": 2300, "63.9": 63_900, "0.1001": 101, "0.0001": 10,
	} {
		out, err := compose.Convert(t.Context(), []byte(`services:
  app:
    image: org/acme/corpus/app@sha256:`+strings.Repeat("a", 64)+`
    cpus: `+cores+`
  helper:
    image: org/acme/corpus/app@sha256:`+strings.Repeat("a", 64)+`
    deploy: {resources: {limits: {cpus: "`+cores+`"}}}
`), compose.Options{Slug: "corpus", Version: "1.0.0", Main: "app"})
		require.NoError(t, err, cores)
		m, err := manifest.Parse(out)
		require.NoError(t, err)
		for _, s := range m.Version.RuntimeProfile.Services {
			require.Equal(t, millis, s.Resources.CPUMillis.Default, "%s of %s", cores, s.Name)
		}
	}
}

// The file of the machine that converts is not asked: an environment variable changes nothing.
func TestNothingIsTakenFromTheEnvironment(t *testing.T) {
	t.Setenv("COMPOSE_PROJECT_NAME", "other")
	t.Setenv("PASSED", "secret")
	file, err := os.ReadFile("testdata/corpus/02-web-and-database.yaml")
	require.NoError(t, err)
	out, err := compose.Convert(t.Context(), file, options(file))
	require.NoError(t, err)
	require.NotContains(t, string(out), "other")
	golden(t, "testdata/corpus/02-web-and-database.manifest.yaml", out)
}

// FuzzConvert: no file makes the converter panic, and what it returns is a manifest.
func FuzzConvert(f *testing.F) {
	files, err := filepath.Glob("testdata/corpus/*.yaml")
	require.NoError(f, err)
	for _, path := range files {
		file, err := os.ReadFile(path)
		require.NoError(f, err)
		f.Add(file)
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		out, err := compose.Convert(t.Context(), file, options(file))
		if err == nil {
			_, err = manifest.Parse(out)
			require.NoError(t, err)
		}
	})
}
