"""TFRecord files, `tf.train.Example` and TFDS folders, read and written without TensorFlow."""
