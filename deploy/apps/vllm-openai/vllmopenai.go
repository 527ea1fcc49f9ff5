// Package vllmopenai builds the images of the vLLM app and holds its manifest template. Where no GPU is, the server is
// a stand-in that computes nothing. The package ships nothing: its builder signs and pushes with pkg/appkit.
package vllmopenai

import (
	_ "embed" // the template belongs to the images
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/gpuaas/gpuaas/pkg/appkit"
)

//go:embed manifest.yaml
var template []byte

// Template returns the manifest template; appkit.FillTemplate wants server_image, monitor_image and version.
func Template() []byte { return template }

// Images makes the images of the stand-in and of the sidecar, by the names that the template has for them. build
// compiles a program of the source tree into a file below dir.
func Images(dir string, build func(program, binary string) error) (map[string]v1.Image, error) {
	images := map[string]v1.Image{}
	for _, i := range []struct {
		name, program, path, title string
		args                       []string
	}{
		{"server", "standin", "/usr/local/bin/vllm", "Stand-in for vLLM; it computes nothing", []string{"serve"}},
		{"monitor", "monitor", "/usr/local/bin/monitor", "Monitor of a vLLM server", nil},
	} {
		binary := filepath.Join(dir, i.name)
		if err := build("./deploy/apps/vllm-openai/"+i.program, binary); err != nil {
			return nil, err
		}
		made, err := image(binary, i.path, i.title, i.args...)
		if err != nil {
			return nil, err
		}
		images[i.name] = made
	}
	return images, nil
}

func image(binary, path, title string, args ...string) (v1.Image, error) {
	return appkit.ImageFromFiles([]appkit.File{{Path: path, Source: binary, Mode: 0o755}}, appkit.ImageConfig{
		Entrypoint: append([]string{path}, args...), User: "1000:1000",
		Labels: map[string]string{"org.opencontainers.image.title": title},
	})
}
