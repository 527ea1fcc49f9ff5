package cli

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/compose"
)

func (a *app) fromComposeCommand() *cobra.Command {
	var (
		opts   compose.Options
		images []string
	)
	command := &cobra.Command{
		Use:   "from-compose FILE",
		Short: "Convert a Compose file into a manifest; nothing leaves this machine",
		Long: "Convert a Compose file into the manifest of an app of several services. Everything comes from the file: " +
			"nothing is\ntaken from the environment or from another file. What cannot be converted is refused by its key " +
			"and line.",
		Example: `gpuaas manifests from-compose compose.yaml --version 1.0.0 \
  --image postgres:16=org/acme/shop/postgres@sha256:… > manifest.yaml`,
		Args: checked(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.Version == "" {
				return usage(errors.New("--version is missing: the app's version"))
			}
			file, err := readInput(a.env.Stdin, args[0])
			if err != nil {
				return usage(err)
			}
			if opts.Images, err = imageFlags(images); err != nil {
				return usage(err)
			}
			out, err := compose.Convert(cmd.Context(), file, opts)
			if err != nil {
				return err
			}
			_, err = a.env.Stdout.Write(out)
			return err
		},
	}
	flags := command.Flags()
	flags.StringVar(&opts.Slug, "slug", "", "the app's slug (default: the file's name)")
	flags.StringVar(&opts.Version, "version", "", "the app's version")
	flags.StringVar(&opts.Main, "main", "", "the service that gets an instance's resources and accelerators (default: "+
		"the only one that publishes ports)")
	flags.StringArrayVar(&images, "image", nil, "IMAGE=REPOSITORY@DIGEST: where an image of the file is in the "+
		"platform's registry; may be repeated")
	return command
}

func imageFlags(images []string) (map[string]string, error) {
	out := map[string]string{}
	for _, text := range images {
		name, ref, ok := strings.Cut(text, "=")
		if !ok || name == "" || ref == "" {
			return nil, errors.New("--image must be IMAGE=REPOSITORY@DIGEST")
		}
		out[name] = ref
	}
	return out, nil
}
